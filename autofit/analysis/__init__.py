"""What finished trials say: pure functions of records, with no store and no process."""
