"""Captured frames: reading a pcap file while it grows, and an ICRC that shares no code with ours.

Shapes: a frame is (time in seconds, bytes from the Ethernet header on). Only little-endian pcap files with
microseconds, as QEMU writes them on the machines we run on.
"""
import struct
import zlib

ROCE_PORT = 4791


class Capture:
    """A pcap file that somebody is still writing. `new()` yields the frames that were completed since the last call."""

    def __init__(self, path):
        self.path = path
        self.at = 24

    def new(self):
        with open(self.path, "rb") as file:
            head = file.read(24)
            if len(head) < 24:
                return
            if struct.unpack("<I", head[:4])[0] != 0xA1B2C3D4:
                raise ValueError(f"{self.path}: not a little-endian pcap file with microseconds")
            file.seek(self.at)
            data = file.read()
        at = 0
        while len(data) - at >= 16:
            seconds, micros, stored, length = struct.unpack_from("<IIII", data, at)
            if len(data) - at - 16 < stored:
                break
            if stored != length:
                raise ValueError(f"{self.path}: a frame of {length} bytes was cut to {stored}")
            yield seconds + micros / 1e6, data[at + 16:at + 16 + stored]
            at += 16 + stored
        self.at += at


def roce(frame):
    """(offset of the IP header, offset of the UDP header, end of the UDP datagram) of a RoCEv2 frame, else None."""
    kind, ip = struct.unpack_from("!H", frame, 12)[0], 14
    if kind == 0x8100 and len(frame) >= 18:
        kind, ip = struct.unpack_from("!H", frame, 16)[0], 18
    if kind == 0x0800 and len(frame) >= ip + 28 and frame[ip + 9] == 17:
        udp = ip + (frame[ip] & 15) * 4
    elif kind == 0x86DD and len(frame) >= ip + 48 and frame[ip + 6] == 17:
        udp = ip + 40
    else:
        return None
    if struct.unpack_from("!H", frame, udp + 2)[0] != ROCE_PORT:
        return None
    return ip, udp, udp + struct.unpack_from("!H", frame, udp + 4)[0]


def icrc_is_right(frame):
    """Whether a RoCEv2 frame's invariant CRC is right: fields that routers change count as ones (IBTA annex A17)."""
    ip, udp, end = roce(frame)
    data = bytearray(frame[ip:end])
    if data[0] >> 4 == 4:
        data[1] = data[8] = 0xFF  # type of service, time to live
        data[10:12] = b"\xff\xff"  # header checksum
    else:
        data[0] |= 0x0F  # traffic class, flow label
        data[1:4] = b"\xff\xff\xff"
        data[7] = 0xFF  # hop limit
    at = udp - ip
    data[at + 6:at + 8] = b"\xff\xff"  # UDP checksum
    data[at + 8 + 4] = 0xFF  # BTH: FECN, BECN and reserved bits
    crc = zlib.crc32(bytes(data[:-4]), zlib.crc32(b"\xff" * 8))
    return struct.pack("<I", crc) == bytes(data[-4:])
