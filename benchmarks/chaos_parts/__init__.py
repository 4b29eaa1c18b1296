"""What the chaos harness is made of: plan, pool members, proxy, faults, journal, ledger, checks."""
