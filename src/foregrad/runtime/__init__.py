"""The compiled call: stages around the compiled graphs, written out as one Python function."""
