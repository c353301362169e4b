"""What a serving engine does with the memory it is given."""
