"""The machinery under the ops: definition, backends, checks, dtypes. It knows no op by name."""
