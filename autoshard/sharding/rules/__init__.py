"""The sharding rule of each op family: one line of named factors."""
