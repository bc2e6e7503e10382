"""What is measured. Each script prints a table last; none is asserted on by time."""
