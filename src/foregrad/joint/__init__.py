"""One functional graph of forward and backward, with a signature of named slots."""
