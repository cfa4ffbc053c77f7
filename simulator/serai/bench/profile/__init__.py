"""`serai profile …`: fits the cost model to measurements, judges it on measurements it never saw, profiles engines.

Reads the measurements through `--data` (default `../shared/data`) and copies none of them. The fit writes small
profiles with their provenance; `validate` judges the shipped ones on models, sizes and GPUs the fit did not use.
"""
