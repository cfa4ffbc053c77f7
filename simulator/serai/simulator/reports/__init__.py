"""What people look at: pictures, and tables as CSV and JSON. The only part of the simulator that writes files.

Pictures need the extra `serai[simulator]` and are the same bytes for the same numbers.
"""
