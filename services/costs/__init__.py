"""How long a task takes: fitted from a profile, corrected by what workers report."""
