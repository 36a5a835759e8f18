"""One engine in several processes, each with a share of the model."""
