//! Curves as an SVG picture.

use plotters::{
    backend::SVGBackend,
    chart::{ChartBuilder, LabelAreaPosition},
    coord::Shift,
    drawing::{DrawingArea, IntoDrawingArea},
    element::{Circle, PathElement, Rectangle, Text},
    series::{LineSeries, PointSeries},
    style::{Color, RGBColor, WHITE},
};
use std::ops::Range;
use textwrap::core::display_width;

/// A curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// What it is called in the legend.
    pub name: String,
    /// The points of the curve, from left to right.
    pub points: Vec<(f64, f64)>,
    /// Whether each point is marked.
    pub marked: bool,
}

/// Width and height in pixels.
const SIZE: (u32, u32) = (900, 480);

/// Numbers from this size on have no place in a picture: the distance between two of them may be no number.
const LARGEST: f64 = 1e300;

/// Colors that are told apart by people who see red and green alike (Okabe and Ito).
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];

/// Draws curves over steps. `what` is the name of the vertical axis. A point that has no place in a picture, such as NaN, is
/// left out.
pub fn svg(what: &str, curves: &[Curve]) -> String {
    let mut out = String::new();
    let mut curves = curves.to_vec();
    for curve in &mut curves {
        curve.points.retain(|(x, y)| x.abs() < LARGEST && y.abs() < LARGEST);
    }
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let steps = padded(points().map(|(x, _)| *x), 0.0);
    let values = padded(points().map(|(_, y)| *y), 0.05);
    let drawn = draw(&mut out, what, &curves, steps, values);
    // The picture is a text in memory, which takes everything.
    drawn.expect("a text has room for a picture");
    match out.find('\n') {
        Some(end) => format!("{}\n{DARK}{}", &out[..end], &out[end..]),
        None => out,
    }
}

/// Colors for people whose system is dark. A rule of a style wins over the attributes of the picture's parts.
const DARK: &str = r##"<style>
@media (prefers-color-scheme: dark) {
  [fill="#FFFFFF"] { fill: #15181c }
  [fill="#000000"] { fill: #dde2e8 }
  [stroke="#000000"] { stroke: #dde2e8 }
  [stroke="#C8C8C8"] { stroke: #4a5058 }
  [fill="#0072B2"] { fill: #4db2ee }
  [stroke="#0072B2"] { stroke: #4db2ee }
  [fill="#D55E00"] { fill: #f08a3c }
  [stroke="#D55E00"] { stroke: #f08a3c }
}
</style>"##;

/// Height of letters in pixels.
const LETTERS: u32 = 14;

fn draw(
    out: &mut String,
    what: &str,
    curves: &[Curve],
    steps: Range<f64>,
    values: Range<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(out, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .set_label_area_size(LabelAreaPosition::Left, 64)
        .set_label_area_size(LabelAreaPosition::Bottom, 52)
        .build_cartesian_2d(steps, values)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc(what)
        .label_style(("sans-serif", LETTERS))
        .axis_desc_style(("sans-serif", LETTERS))
        .x_label_formatter(&|x| format!("{x:.0}"))
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    for (curve, color) in curves.iter().zip(COLORS.iter().cycle()) {
        let line = color.stroke_width(2);
        chart.draw_series(LineSeries::new(curve.points.iter().copied(), line))?;
        if curve.marked {
            let dots: PointSeries<_, _, Circle<_, _>, _> =
                PointSeries::new(curve.points.iter().copied(), 4, color.filled());
            chart.draw_series(dots)?;
        }
    }
    legend(&chart.plotting_area().strip_coord_spec(), curves)?;
    area.present()?;
    drop(chart);
    Ok(())
}

/// Draws the names of curves into the upper right corner of an area, in a frame that has room for them.
fn legend(area: &DrawingArea<SVGBackend<'_>, Shift>, curves: &[Curve]) -> Result<(), Box<dyn std::error::Error>> {
    let columns = curves.iter().map(|curve| display_width(&curve.name)).max().unwrap_or(0);
    if columns == 0 {
        return Ok(());
    }
    let text = (columns as f64 * COLUMN * f64::from(LETTERS)).ceil() as i32;
    let size = (MARGIN + SAMPLE + MARGIN + text + MARGIN, MARGIN + curves.len() as i32 * LINE + MARGIN);
    let (left, top) = ((area.dim_in_pixel().0 as i32 - size.0 - GAP).max(GAP), GAP);
    let frame = [(left, top), (left + size.0, top + size.1)];
    area.draw(&Rectangle::new(frame, WHITE.mix(0.8).filled()))?;
    area.draw(&Rectangle::new(frame, RGBColor(200, 200, 200)))?;
    for (i, (curve, color)) in curves.iter().zip(COLORS.iter().cycle()).enumerate() {
        let (x, y) = (left + MARGIN, top + MARGIN + i as i32 * LINE);
        let middle = y + LINE / 2;
        area.draw(&PathElement::new([(x, middle), (x + SAMPLE, middle)], color.stroke_width(2)))?;
        area.draw(&Text::new(curve.name.as_str(), (x + SAMPLE + MARGIN, y + 2), ("sans-serif", LETTERS)))?;
    }
    Ok(())
}

/// How many times the height of letters a column of a name is wide: half of a Chinese character, or a wide Latin letter. Who
/// shows the picture chooses the font, so that its width is not known.
const COLUMN: f64 = 0.52;
/// Pixels of the legend: between its parts, of the sample of a line, from one name to the next, and around the legend.
const MARGIN: i32 = 10;
const SAMPLE: i32 = 18;
const LINE: i32 = 18;
const GAP: i32 = 5;

/// From the smallest to the largest value, and a share of the distance more on both sides.
fn padded(values: impl Iterator<Item = f64>, share: f64) -> Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    match high - low {
        distance if distance > 0.0 => low - share * distance..high + share * distance,
        // One value, or none.
        _ if low.is_finite() => low - 0.5..low + 0.5,
        _ => 0.0..1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_goes_through_its_points() {
        let curve = |points: &[(f64, f64)]| Curve { name: "a<b".into(), points: points.to_vec(), marked: true };
        let picture = svg("loss", &[curve(&[(1.0, 4.0), (2.0, 3.0), (3.0, 2.0)])]);
        assert!(picture.starts_with("<svg") && picture.contains("a&lt;b") && picture.contains("loss"), "{picture}");
        // Equal steps are equally far apart, and so are equal losses.
        let centers: Vec<(f64, f64)> = picture
            .split("<circle ")
            .skip(1)
            .map(|circle| {
                let number = |name: &str| circle.split(name).nth(1).unwrap().split('"').nth(1).unwrap().parse::<f64>();
                (number("cx=").unwrap(), number("cy=").unwrap())
            })
            .collect();
        let [a, b, c] = centers[..] else { panic!("{centers:?}") };
        assert!(a.0 < b.0 && a.1 < b.1, "{centers:?}");
        assert!((b.0 - a.0 - (c.0 - b.0)).abs() <= 1.0 && (b.1 - a.1 - (c.1 - b.1)).abs() <= 1.0, "{centers:?}");
    }

    /// The widest fonts without serifs need 0.62 of their size for a letter on average, and the size of a Chinese character for it.
    #[test]
    fn the_legend_has_room_for_its_names() {
        let names =
            ["a-run-with-a-long-name, training", "a-run-with-a-long-name, evaluation", "模型的訓練, evaluation"];
        let curve = |name: &str| Curve { name: name.into(), points: vec![(0.0, 1.0), (1.0, 2.0)], marked: false };
        let picture = svg("loss", &names.map(curve));
        let number = |line: &str, name: &str| {
            let value = line.split(&format!(" {name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
            value.and_then(|value| value.parse::<f64>().ok()).unwrap_or_else(|| panic!("no {name}: {line}"))
        };
        let frame =
            picture.lines().find(|line| line.starts_with("<rect ") && line.contains("stroke=\"#C8C8C8\"")).unwrap();
        let (right, bottom) =
            (number(frame, "x") + number(frame, "width"), number(frame, "y") + number(frame, "height"));
        assert!(right < f64::from(SIZE.0) && bottom < f64::from(SIZE.1), "{frame}");
        for name in names {
            let text = picture.split("<text ").find(|text| text.contains(name)).unwrap();
            let text = format!(" {text}");
            let letters = |c: char| if c.is_ascii() { 0.62 } else { 1.0 };
            let end = number(&text, "x") + name.chars().map(letters).sum::<f64>() * number(&text, "font-size");
            assert!(end + 5.0 < right, "{name} ends at {end}, and its frame at {right}");
            assert!(number(&text, "y") + number(&text, "font-size") + 5.0 < bottom, "{name}");
        }
    }

    /// On a dark screen no part keeps a color of paper or ink.
    #[test]
    fn a_picture_has_colors_for_dark_screens() {
        let curve = |n: u8| Curve { name: "x".into(), points: vec![(0.0, f64::from(n)), (1.0, 2.0)], marked: true };
        let picture = svg("loss", &(0..8).map(curve).collect::<Vec<_>>());
        let (style, parts) = picture.split_once("</style>").unwrap();
        assert!(style.starts_with("<svg ") && style.contains("@media (prefers-color-scheme: dark)"), "{style}");
        for kind in ["fill", "stroke"] {
            for color in ["#FFFFFF", "#000000", "#C8C8C8"] {
                let part = format!("{kind}=\"{color}\"");
                assert!(!parts.contains(&part) || style.contains(&format!("[{part}] {{ {kind}: ")), "{part}");
            }
        }
    }

    #[test]
    fn runs_without_a_step_have_a_picture_too() {
        for points in [vec![], vec![(1.0, 2.0)], vec![(1.0, f64::NAN)], vec![(1.0, 1e308), (2.0, -1e308)]] {
            assert!(svg("loss", &[Curve { name: "x".into(), points, marked: false }]).ends_with("</svg>\n"));
        }
    }

    #[test]
    fn a_point_that_is_no_number_is_left_out() {
        let picture =
            |points: &[(f64, f64)]| svg("loss", &[Curve { name: "x".into(), points: points.to_vec(), marked: true }]);
        let good = picture(&[(1.0, 4.0), (3.0, 2.0)]);
        assert_eq!(picture(&[(1.0, 4.0), (2.0, f64::NAN), (2.0, f64::INFINITY), (2.0, 1e308), (3.0, 2.0)]), good);
    }
}
