"""Data that the package ships; ``README.md`` beside this file names the source."""
