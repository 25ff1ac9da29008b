//! Pillow's conversion to hue, saturation and value and back, each in a byte.

/// Turns the hue by this share of a whole turn, in steps of 1/255, as torchvision does for images of Pillow.
pub(super) fn turn_hue(pixels: &mut [u8], turn: f64) {
    let steps = (turn * 255.) as i32 as u8;
    for pixel in pixels.as_chunks_mut::<3>().0 {
        let [hue, saturation, value] = to_hsv(pixel);
        *pixel = to_rgb([hue.wrapping_add(steps), saturation, value]);
    }
}

/// `rgb2hsv` of Pillow's `Convert.c`, with its roundings: some steps are in f32, some in f64.
fn to_hsv(&[red, green, blue]: &[u8; 3]) -> [u8; 3] {
    let (largest, smallest) = (red.max(green).max(blue), red.min(green).min(blue));
    if largest == smallest {
        return [0, 0, largest];
    }
    let range = f32::from(largest - smallest);
    let distance = |channel: u8| f32::from(largest - channel) / range;
    let (to_red, to_green, to_blue) = (distance(red), distance(green), distance(blue));
    let sixths = if red == largest {
        to_blue - to_green
    } else if green == largest {
        (2. + f64::from(to_red) - f64::from(to_blue)) as f32
    } else {
        (4. + f64::from(to_green) - f64::from(to_red)) as f32
    };
    let hue = ((f64::from(sixths) / 6. + 1.) % 1.) as f32;
    let saturation = range / f32::from(largest);
    [(f64::from(hue) * 255.) as u8, (f64::from(saturation) * 255.) as u8, largest]
}

/// `hsv2rgb` of Pillow's `Convert.c`.
fn to_rgb([hue, saturation, value]: [u8; 3]) -> [u8; 3] {
    if saturation == 0 {
        return [value; 3];
    }
    let sixths = f64::from(hue) * 6. / 255.;
    let sector = sixths.floor();
    let rest = (sixths - sector) as f32;
    let saturation = (f64::from(saturation) / 255.) as f32;
    let shade = |share: f64| (f64::from(value) * (1. - share)).round() as u8;
    let low = shade(f64::from(saturation));
    let falling = shade(f64::from(saturation * rest));
    let rising = shade(f64::from(saturation) * (1. - f64::from(rest)));
    match sector as u8 % 6 {
        0 => [value, rising, low],
        1 => [falling, value, low],
        2 => [low, value, rising],
        3 => [low, falling, value],
        4 => [rising, low, value],
        _ => [value, low, falling],
    }
}
