//! The contract between appliance, control process and CLI.
