//! Placeholder until the first part lands.
