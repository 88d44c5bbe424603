//! What the configuration takes and what it refuses.

use super::*;

const MINIMAL: &str = "\
[appliance]
name = \"f0\"

[port]
kind = \"shm\"
link = \"lab\"
addresses = [\"192.0.2.1/24\"]
";

fn refused(text: &str) -> ConfigError {
    ApplianceConfig::parse("t.toml", text).expect_err(text)
}

#[test]
fn minimal_file_has_stated_defaults() {
    let config = ApplianceConfig::parse("t.toml", MINIMAL).unwrap();
    assert_eq!(config.name.as_str(), "f0");
    assert_eq!(config.run_dir, Path::new(DEFAULT_RUN_DIR));
    assert_eq!(config.memory, MemoryConfig { bytes: DEFAULT_MEMORY_BYTES, pages: PagePolicy::Auto });
    assert_eq!(config.workers.len(), 1);
    assert_eq!(config.icrc, IcrcSetting::On);
    assert_eq!(config.limits, LimitsConfig::default());
}

#[test]
fn everything_is_taken() {
    let text = "\
[appliance]
name = \"f0\"
run_dir = \"/tmp/x\"
node_guid = \"0200:00ff:fe00:0001\"
[memory]
bytes = \"4M\"
pages = \"2M\"
[[worker]]
core = 1
idle = \"spin\"
[[worker]]
core = \"none\"
spin_passes = 10
[port]
kind = \"xdp\"
interface = \"eth0\"
mode = \"generic\"
zero_copy = \"off\"
queues = 2
[port.fault]
seed = 7
loss = 0.01
direction = \"tx\"
delay = 1
delay_us = 50
[port.capture]
file = \"/tmp/x.pcapng\"
[limits]
max_qp = 4
[diagnosis]
icrc = \"off\"
";
    let config = ApplianceConfig::parse("t.toml", text).unwrap();
    assert_eq!(config.node_guid, Some(0x0200_00ff_fe00_0001));
    assert_eq!(config.memory, MemoryConfig { bytes: 4 << 20, pages: PagePolicy::Huge2M });
    assert_eq!(config.workers[0], WorkerConfig { core: CoreChoice::Core(1), idle: IdlePolicy::Spin });
    let second = WorkerConfig { core: CoreChoice::Unpinned, idle: IdlePolicy::Adaptive { spin_passes: 10 } };
    assert_eq!(config.workers[1], second);
    let fault = config.port.fault.unwrap();
    assert_eq!((fault.seed, fault.loss.get(), fault.direction), (7, 0.01, FaultDirection::Tx));
    assert_eq!((fault.delay.get(), fault.delay_us), (1.0, 50));
    assert_eq!(config.port.capture.as_deref(), Some(Path::new("/tmp/x.pcapng")));
    assert_eq!(config.limits.max_qp, 4);
    assert_eq!(config.icrc, IcrcSetting::Off);
}

/// Every refusal names line and key.
#[test]
fn refusals_name_line_and_key() {
    let cases: &[(&str, &str, usize, &str)] = &[
        // (text to replace, with what, line, key)
        ("name = \"f0\"", "name = \"../f0\"", 2, "appliance.name"),
        ("name = \"f0\"", "name = \"ctl\"", 2, "appliance.name"),
        ("name = \"f0\"", "nam = \"f0\"", 2, "appliance.nam"),
        ("name = \"f0\"", "name = \"f0\"\nrun_dir = \"tmp\"", 3, "appliance.run_dir"),
        ("name = \"f0\"", "name = \"f0\"\nnode_guid = \"02\"", 3, "appliance.node_guid"),
        ("name = \"f0\"\n", "name = \"f0\"\n[memory]\nbytes = \"4Q\"\n", 4, "memory.bytes"),
        ("name = \"f0\"\n", "name = \"f0\"\n[memory]\nbytes = 4096\n", 4, "memory.bytes"),
        ("name = \"f0\"\n", "name = \"f0\"\n[memory]\npages = \"4K\"\n", 4, "memory.pages"),
        ("name = \"f0\"\n", "name = \"f0\"\n[[worker]]\ncore = -1\n", 4, "worker.core"),
        ("name = \"f0\"\n", "name = \"f0\"\n[[worker]]\ncore = \"any\"\n", 4, "worker.core"),
        ("name = \"f0\"\n", "name = \"f0\"\n[[worker]]\ncore=3\n[[worker]]\ncore=3\n", 6, "worker.core"),
        (
            "name = \"f0\"\n",
            "name = \"f0\"\n[[worker]]\nidle = \"spin\"\nspin_passes = 1\n",
            5,
            "worker.spin_passes",
        ),
        ("kind = \"shm\"", "kind = \"dpdk\"", 5, "port.kind"),
        ("kind = \"shm\"", "kind = \"xdp\"", 6, "port.link"),
        ("link = \"lab\"\n", "", 5, "port.link"),
        ("addresses = [\"192.0.2.1/24\"]\n", "", 5, "port.addresses"),
        ("192.0.2.1/24", "192.0.2.1", 7, "port.addresses"),
        ("192.0.2.1/24", "192.0.2.1/33", 7, "port.addresses"),
        ("192.0.2.1/24", "224.0.0.1/24", 7, "port.addresses"),
        ("[\"192.0.2.1/24\"]", "[\"192.0.2.1/24\", \"192.0.2.1/16\"]", 7, "port.addresses"),
        ("link = \"lab\"", "link = \"lab\"\nmtu = 100", 7, "port.mtu"),
        ("link = \"lab\"", "link = \"lab\"\nqueues = 2", 7, "port.queues"),
        ("link = \"lab\"", "link = \"lab\"\nmac = \"01:00:00:00:00:00\"", 7, "port.mac"),
        ("link = \"lab\"", "link = \"lab\"\nmode = \"auto\"", 7, "port.mode"),
        ("1/24\"]\n", "1/24\"]\n[port.fault]\nseed = 1\nloss = 1.5\n", 10, "port.fault.loss"),
        ("1/24\"]\n", "1/24\"]\n[port.fault]\nseed = 1\nlos = 0.5\n", 10, "port.fault.los"),
        ("1/24\"]\n", "1/24\"]\n[limits]\nmax_qp = 0\n", 9, "limits.max_qp"),
        ("1/24\"]\n", "1/24\"]\n[diagnosis]\nicrc = \"maybe\"\n", 9, "diagnosis.icrc"),
        ("1/24\"]\n", "1/24\"]\n[what]\n", 8, "what"),
        ("name = \"f0\"", "name = ", 2, "appliance.name"),
    ];
    for (from, to, line, key) in cases {
        let text = MINIMAL.replace(from, to);
        assert_ne!(text, MINIMAL);
        let error = refused(&text);
        assert_eq!((error.line, error.key.as_str()), (*line, *key), "{to}: {error}");
        let shown = error.to_string();
        assert!(shown.starts_with(&format!("t.toml:{line}: {key}: ")), "{shown}");
        assert!(!shown.contains('\n'), "{shown}");
    }
}

#[test]
fn a_missing_file_says_so() {
    let error = ApplianceConfig::load(Path::new("/nonexistent/f.toml")).unwrap_err();
    assert!(error.to_string().starts_with("/nonexistent/f.toml: cannot be read"), "{error}");
}

#[test]
fn sizes() {
    for (text, bytes) in
        [("64M", Some(64 << 20)), ("1G", Some(1 << 30)), ("12", Some(12)), ("2K", Some(2048))]
    {
        assert_eq!(value::parse_size(text), bytes);
    }
    for text in ["", "M", "-1", "1.5G", "99999999999T", "1MB"] {
        assert_eq!(value::parse_size(text), None, "{text}");
    }
}
