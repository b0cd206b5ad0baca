"""Simulators: the encoder and the decoder that serve, on a virtual clock, with arrivals and costs in place of computing."""
