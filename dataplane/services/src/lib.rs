//! Services on verbs.
