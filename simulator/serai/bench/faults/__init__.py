"""The fault table: what clients see of Serai, and of other gateways, when engines, clients and bodies misbehave."""
