"""The graph form that passes read and write, its `torch.fx` face, and checks on it."""
