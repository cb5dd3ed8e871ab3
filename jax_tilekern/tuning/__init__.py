"""``tune`` measures candidates and stores the fastest kernel."""
