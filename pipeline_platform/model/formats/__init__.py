"""Formats of payloads: Avro, Protobuf, JSON in Confluent's wire format, and compression."""
