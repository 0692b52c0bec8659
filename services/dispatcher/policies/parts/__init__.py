"""Building blocks of the pacing policy: each a small pure object with one job."""
