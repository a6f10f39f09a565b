"""Turn a recording with views and in-place writes into a graph without side effects."""
