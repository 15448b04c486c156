"""Under torchft, the ranks of an exchange are the replicas of a quorum, which may change at each step."""
