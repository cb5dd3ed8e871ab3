"""Records: their form, their files, and the tables made from them."""
