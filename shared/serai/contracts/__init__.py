"""What crosses a wire: subjects, messages, records. Imports nothing of ours."""
