"""What a run did, as data: made from traces, for those who draw or measure."""
