"""What several strategies need of torch."""
