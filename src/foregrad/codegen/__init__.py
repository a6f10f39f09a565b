"""Write Python source: lines, literals, packed arguments, and code that takes nested values apart."""
