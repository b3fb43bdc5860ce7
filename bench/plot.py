"""The two drawings of the benchmarks, as SVG, with nothing but the standard library."""
import math

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 180, 20, 60
COLORS = ('#1f6fb4', '#888888', '#d1592a', '#3a8f3a')


class Drawing:
    """A frame whose axes are logarithmic where they say so; x and y are given in the data's units."""

    def __init__(self, x_range, y_range, x_label, y_label, y_log):
        self.x_range, self.y_range, self.y_log = x_range, y_range, y_log
        self.parts = []
        self.text(LEFT + self.inner_width / 2, HEIGHT - 12, x_label, 'middle')
        self.parts.append(f'<text transform="translate(16 {TOP + self.inner_height / 2}) rotate(-90)" text-anchor="middle">'
                          f'{y_label}</text>')
        self.parts.append(f'<rect x="{LEFT}" y="{TOP}" width="{self.inner_width}" height="{self.inner_height}" fill="none" '
                          'stroke="#999"/>')

    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(self, value):
        low, high = (math.log(v) for v in self.x_range)
        return LEFT + self.inner_width * (math.log(value) - low) / (high - low)

    def y(self, value):
        low, high = self.y_range
        if self.y_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return TOP + self.inner_height * (1 - (value - low) / (high - low))

    def text(self, x, y, text, anchor='start', color='#222'):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>')

    def line(self, points, color, dashes=''):
        path = ' '.join(f'{x:.1f},{y:.1f}' for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5" '
                          f'stroke-dasharray="{dashes}"/>')

    def x_tick(self, value):
        self.line([(self.x(value), TOP + self.inner_height), (self.x(value), TOP + self.inner_height + 5)], '#999')
        self.text(self.x(value), TOP + self.inner_height + 20, f'{value:g}', 'middle')

    def y_tick(self, value):
        self.line([(LEFT, self.y(value)), (LEFT + self.inner_width, self.y(value))], '#ddd')
        self.text(LEFT - 6, self.y(value) + 4, f'{value:,g}', 'end')

    def write(self, path):
        with open(path, 'w', encoding='utf-8') as file:
            file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
                       'font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n' + '\n'.join(self.parts) + '\n</svg>\n')


def powers(low, high, steps=(1, 2, 5)):
    """1, 2, 5, 10 ... between low and high."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]


def histogram(path, sides, percentile, x_label):
    """`sides`: {name: {log(1.02) of ns: count}}. Bins are joined by five; p50, p99, p99.9 are marked."""
    joined = {}
    for name, bins in sides.items():
        coarse = joined.setdefault(name, {})
        for key, count in bins.items():
            coarse[key // 5] = coarse.get(key // 5, 0) + 100 * count / sum(bins.values())
    value = lambda key: 1.02**(5 * key) / 1000
    low = 0.8 * value(min(min(bins) for bins in joined.values()))
    high = 1.5 * max(percentile(bins, 99.95) for bins in sides.values())
    drawing = Drawing((low, high), (0, 1.1 * max(max(bins.values()) for bins in joined.values())), x_label, '% of the calls', False)
    for tick in powers(low, high):
        drawing.x_tick(tick)
    for number, (name, bins) in enumerate(joined.items()):
        color, points = COLORS[number], []
        for key in range(min(bins) - 1, max(bins) + 2):
            if low <= value(key) and value(key + 1) <= high:
                points += [(drawing.x(value(key)), drawing.y(bins.get(key, 0))), (drawing.x(value(key + 1)), drawing.y(bins.get(key, 0)))]
        drawing.line(points, color)
        line = TOP + 20 + 90 * number
        drawing.text(WIDTH - RIGHT + 12, line, name, color=color)
        for row, percent in enumerate((50, 99, 99.9), 1):
            at = percentile(sides[name], percent)
            drawing.text(WIDTH - RIGHT + 12, line + 17 * row, f'p{percent:g}: {at:.0f} µs', color=color)
            drawing.line([(drawing.x(at), TOP), (drawing.x(at), TOP + drawing.inner_height)], color, '2 4')
    drawing.write(path)


def lines(path, sides, x_label, y_label):
    """`sides`: {name: {x: y}}, both axes logarithmic."""
    xs = sorted({x for points in sides.values() for x in points})
    ys = [y for points in sides.values() for y in points.values()]
    drawing = Drawing((xs[0] / 1.2, xs[-1] * 1.2), (min(ys) / 1.5, max(ys) * 1.5), x_label, y_label, True)
    for x in xs:
        drawing.x_tick(x)
    for y in powers(*drawing.y_range):
        drawing.y_tick(y)
    for number, (name, points) in enumerate(sides.items()):
        drawing.line([(drawing.x(x), drawing.y(y)) for x, y in sorted(points.items())], COLORS[number])
        last = max(points)
        drawing.text(WIDTH - RIGHT + 12, drawing.y(points[last]) + 4, name, color=COLORS[number])
    drawing.write(path)
