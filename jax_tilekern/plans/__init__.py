"""Static planning: sizes, types and an architecture in, a kernel and its launch out."""
