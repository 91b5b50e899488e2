"""What the tests of this project share and users do not need."""
