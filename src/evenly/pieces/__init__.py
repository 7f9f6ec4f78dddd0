"""Same bits on any number of processes: a step is cut into pieces, and a tree over them adds up."""
