"""What was done and what is in a tree: metrics of states, descriptions of leaves."""
