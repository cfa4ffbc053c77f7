"""OpenAI's Responses API on top of chat completions: requests, whole answers and streams; nothing is stored. Pure.

What is translated how, what is refused and what is lost: docs/translated-endpoints.md.
"""
