"""Where a backbone's network comes from: timm, this package, or the user's own module."""
