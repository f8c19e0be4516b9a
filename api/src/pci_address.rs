//! Addresses of PCI functions, which order GPUs.

use std::fmt;
use std::str::FromStr;

/// The address of a PCI function. The order is the kernel's: domain, bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Domain; most machines have only 0.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, 0-31.
    pub device: u8,
    /// Function, 0-7.
    pub function: u8,
}

/// Text that is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address: it must look like 0000:1b:00.0")]
pub struct PciAddressError(String);

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    /// Reads `dddd:bb:dd.f`, as sysfs spells it: lower case, a domain of four digits or more.
    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        read(text)
            // One spelling per address.
            .filter(|address| address.to_string() == text)
            .ok_or_else(|| PciAddressError(text.to_owned()))
    }
}

fn read(text: &str) -> Option<PciAddress> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let byte = |digits, most| {
        let value = u8::from_str_radix(digits, 16).ok();
        value.filter(|value| *value <= most)
    };
    Some(PciAddress {
        domain: u32::from_str_radix(domain, 16).ok()?,
        bus: byte(bus, u8::MAX)?,
        device: byte(device, 31)?,
        function: byte(function, 7)?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "1b:00.0",
            "0:1b:00.0",
            "0000:1B:00.0",
            "0000:1b:00",
            "0000:1b:20.0",
            "0000:1b:00.8",
            "0000:1b:00.00",
            "00010000:1b:00.0",
            "+000:1b:00.0",
            "0000:1b:00.0 ",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text:?}");
        }
        assert_eq!(
            "x".parse::<PciAddress>().unwrap_err().to_string(),
            r#""x" is not a PCI address: it must look like 0000:1b:00.0"#
        );
    }

    proptest! {
        #[test]
        fn every_address_is_read_back_and_keeps_its_order(
            one: (u32, u8, u8, u8),
            other: (u32, u8, u8, u8),
        ) {
            let address = |(domain, bus, device, function)| PciAddress {
                domain,
                bus,
                device: device % 32,
                function: function % 8,
            };
            let (one, other) = (address(one), address(other));
            prop_assert_eq!(one.to_string().parse(), Ok(one));
            let of = |a: PciAddress| (a.domain, a.bus, a.device, a.function);
            prop_assert_eq!(one.cmp(&other), of(one).cmp(&of(other)));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9a-fx:.+-]{0,16}|.*") {
            let _ = text.parse::<PciAddress>();
        }
    }
}
