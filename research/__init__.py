"""The papers' tables and figures: hPLMs beside the models they are compared with."""
