"""The relay among machines: what load balancers are told."""
