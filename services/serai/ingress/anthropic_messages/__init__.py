"""Anthropic's Messages API on top of chat completions: requests, whole answers, streams and errors. Pure.

What is translated how, what is refused and what is lost: docs/translated-endpoints.md.
"""
