"""How fast the transforms are, against what they replace: `python -m benchmarks`."""
