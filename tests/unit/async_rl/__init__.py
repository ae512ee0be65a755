"""What all roles share."""
