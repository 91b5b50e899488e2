"""Who is measured: postroom, bare SQL, and the peers, each in its best configuration."""
