"""Plans of selection and sorting."""
