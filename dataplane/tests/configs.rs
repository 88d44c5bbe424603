//! Every file in `configs/` loads: the appliance's here, the control process's in its own test.

use std::path::Path;

use ferroce_api::config::{APPLIANCE_MARK, ApplianceConfig, WireConfig};

#[test]
fn every_shipped_file_loads() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut loaded = Vec::new();
    for entry in std::fs::read_dir(&folder).expect("configs/") {
        let path = entry.expect("entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".toml") || name.starts_with("ctld") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("readable");
        assert!(
            text.starts_with(APPLIANCE_MARK),
            "{name} does not say in its first line which program reads it"
        );
        loaded.push((name, ApplianceConfig::load(&path).unwrap_or_else(|error| panic!("{error}"))));
    }
    loaded.sort_by(|a, b| a.0.cmp(&b.0));
    let names: Vec<_> = loaded.iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.starts_with(&["minimal-shm-a.toml", "minimal-shm-b.toml", "xdp.toml"]), "{names:?}");

    // The two minimal ones fit each other.
    let (a, b) = (&loaded[0].1, &loaded[1].1);
    assert_eq!(a.port.wire, b.port.wire);
    assert!(matches!(a.port.wire, WireConfig::Shm { .. }));
    assert_eq!(a.port.mtu, b.port.mtu);
    assert_eq!(a.workers.len(), b.workers.len());
    assert_ne!(a.name, b.name);
    assert!(a.port.addresses.iter().all(|x| b.port.addresses.iter().all(|y| x.ip() != y.ip())));
}

/// The documented file says nothing that is not so: each commented-out key is one that the parser knows.
#[test]
fn commented_keys_are_known() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/xdp.toml");
    let text = std::fs::read_to_string(&path).expect("readable");
    let uncommented: String = text
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(key)
                if key.starts_with('[') || key.split_once(" = ").is_some_and(|(k, _)| !k.contains(' ')) =>
            {
                key
            }
            _ => line,
        })
        .fold(String::new(), |all, line| all + line + "\n");
    assert!(uncommented.contains("\n[port.fault]\n") && uncommented.contains("\nnode_guid"));
    // The keys of the other wire are known, and refused for what they are.
    let error = ApplianceConfig::parse("xdp.toml", &uncommented).expect_err("keys of both wires");
    assert_eq!(error.message, "only with kind = \"shm\"", "{error}");
    let xdp: String = uncommented
        .lines()
        .filter(|line| !["link = ", "mtu = ", "mac = "].iter().any(|key| line.starts_with(key)))
        .fold(String::new(), |all, line| all + line + "\n");
    let config = ApplianceConfig::parse("xdp.toml", &xdp).expect("every key is known");
    assert!(config.port.fault.is_some() && config.port.capture.is_some() && config.node_guid.is_some());
    let shm: String = uncommented
        .lines()
        .filter(|line| !["interface", "mode", "zero_copy"].iter().any(|key| line.starts_with(key)))
        .fold(String::new(), |all, line| all + line + "\n")
        .replace("kind = \"xdp\"", "kind = \"shm\"");
    ApplianceConfig::parse("xdp.toml", &shm).expect("every key is known");
}
