"""Records: their form, their files, and the tables and plots made from them."""
