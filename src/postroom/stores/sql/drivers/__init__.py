"""How each database library runs our statements; a module here is the only one to import its library."""
