"""Run the program once on abstract tensors and write down what it does."""
