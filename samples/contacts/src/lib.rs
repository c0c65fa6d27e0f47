//! A contacts service whose events are delivered by Postrider.
