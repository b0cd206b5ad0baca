"""What is counted while serving: named here, added up in the models' processes, published to Triton once a second."""
