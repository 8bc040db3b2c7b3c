"""The relay across processes: wire format, engine process, instance and gateway."""
