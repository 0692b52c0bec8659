"""The live page for people without Grafana: reads Redis and the gateway, changes nothing."""
