"""Background passes over rows that fall due."""
